"""What rounds cost on this machine, learned while they run. Arithmetic only: no clock, no file.

rounds.py   what a round was (`Round`), and what one of any size is expected to take (`Costs`)
times.py    what is learned from measured times: medians, lines between them, experts
"""
