"""C code of the package, and how it is compiled and loaded."""
