"""A tiny vision-language model of our own: scenes to look at, the model in torch, its training, its GGUF files (docs/tiny-vision-model.md)."""
