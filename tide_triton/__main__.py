"""`python -m tide_triton`: the same as `tide`."""

from tide_triton.cli import main

main()
