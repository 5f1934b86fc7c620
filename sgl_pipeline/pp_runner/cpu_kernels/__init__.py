"""C++ for CPU cores: the sources, how they are compiled here, and the functions they export."""
