"""`python -m kvfold`: the same as the command `kvfold`."""

from kvfold.cli import main

main()
