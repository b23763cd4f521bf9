# Its functions are described in `fast`, through which alone they are called.

INTERFACE: int
