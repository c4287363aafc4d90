"""``python -m gpuarena.cli``."""

from gpuarena.cli import main

main()
