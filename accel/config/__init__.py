"""The configuration dataclasses: free of torch, used as the schema of the runner's YAML."""
