"""The C++ target of the fusion compiler: loops with OpenMP."""
