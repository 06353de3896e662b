"""One class per object of the C ABI: thin, typed, and without state of their own that could disagree with the kernel's."""
