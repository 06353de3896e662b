"""``pylloyal bench``: what the product costs beside a program that uses the engine directly, and beside its peers."""
