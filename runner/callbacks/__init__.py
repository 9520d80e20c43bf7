"""What happens around the loop: each callback in a file of its own."""
