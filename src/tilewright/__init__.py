"""tilewright: PyTorch operators as fast as the machine allows, with proof."""

__version__ = "0.1.0.dev0"
