"""Python imports this at its start, in the processes that tests start: searching all that torch and Lightning ever
imported for garbage, while they are imported and once more at the end, takes a third of a short program's time."""

import atexit
import gc

gc.set_threshold(200_000, 50, 50)
atexit.register(gc.freeze)
