"""What the fork server does once, so that no rank forked from it has to.

A third of the processor time of a rank with a tiny model went into loading these modules, guarding
them against strangers' code, and into the thousand regular expressions of names that Transformers
makes with its first model.
"""

from __future__ import annotations

from importlib import import_module

from agents import foreign_code
from agents.program import imports_that_stay

foreign_code.install()  # before the imports, as in every program of ours
with imports_that_stay():
    import agents.trainer.__main__
    import agents.trainer.run  # noqa: F401

    for _name in ("transformers.models.llama.modeling_llama", "peft.tuners.lora.bnb"):
        import_module(_name)
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
