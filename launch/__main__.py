"""python -m launch: the same as the fedsim command."""

from launch.cli import main

main()
