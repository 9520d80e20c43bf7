"""What runs are: tables, descriptions, comparisons and a page."""
