"""What a training would need of each GPU, said before there is one: ``lightning_zero.plan``.

``training.py`` runs a training step on tensors that have shapes and no memory; ``compiled.py`` puts the graphs in the
place of modules that would be compiled, as torch's own partitioner cuts them; ``ledger.py`` and ``lifetimes.py`` count
what is alive; ``static.py`` and ``states.py`` know what stays from step to step; ``seconds.py`` how long it all takes.
"""
