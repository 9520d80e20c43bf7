"""The console, metrics.jsonl and the trackers."""
