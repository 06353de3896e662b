"""Media and other sources of a prompt: what they are made of, before any of it meets a model."""
