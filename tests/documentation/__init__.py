"""Every example of the documentation that defines the API, run as it stands there."""
