"""Language models of Hugging Face: models, adapters, text data, generation. Extra `hf`."""
