import os

# Inductor would compile and load programs to see which of the processor's vectors the compiler knows: 17 s with an empty
# cache, and 1.5 s in each process with a full one. A compiler that does not know them says so.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
