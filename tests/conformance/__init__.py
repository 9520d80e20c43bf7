"""What the documentation promises, who tests it, and whether that test would notice its absence."""
