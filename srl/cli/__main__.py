"""`python -m srl.cli`: the `srl` command where it is not on the PATH."""

from srl.cli.main import main

main()
