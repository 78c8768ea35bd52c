"""Private names of PEFT, which need not be installed."""

# Surrounds the forward of a module of which adapters change a parameter; takes the adapters' names. (peft 0.21)
ACTIVATE_ADAPTERS = "_activate_lora"
