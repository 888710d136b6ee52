"""The front end of the fusion compiler: from a function of tensors to a graph."""
