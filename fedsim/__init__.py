"""fedsim, ground floor: values, the algorithms' contract, data, models, wire format, round machine.

Nothing below this package opens a socket, starts a process or knows an algorithm by name.
"""

__version__ = "0.1.0"
