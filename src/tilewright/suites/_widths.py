"""Hidden sizes of GPT-2 and GPT-3 models (NVIDIA/Fuser issue 383), and two wider ones."""

WIDTHS = (768, 1024, 1280, 1536, 1600, 2048, 2560, 4096, 5140, 12288, 16384, 20480, 32768, 65536)
