"""Tiny LLaMA training in four tiers, with a harness whose verdicts can be trusted.

Importing the package loads neither torch nor a model; ask for what you need:

    from tinyllama.harness import Op, Tensor, Case       # the harness alone
    from tinyllama.ops import OPS                         # every declared op
    from tinyllama.model import TinyLlama                 # the model
"""

__version__ = "0.2.0"
