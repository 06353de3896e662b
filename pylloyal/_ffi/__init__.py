"""The only package that imports ctypes: the generated table, the loader, handles and step buffers."""
