"""The peers: what others have written for the same work, timed beside ours.

Of training steps: Hugging Face's Llama and V1 under torch.compile, with the weights, batches,
optimizer settings and precision of the tiers. `CLIENT` is their model with our ops in it, as a user
has it. Of single ops: files of providers, such as Liger-Kernel's. Each runs as its own users would
run it; what it needs and this machine lacks is said instead of a time.
"""

import os
from pathlib import Path
from typing import Any

from tinyllama.bench.contender import Contender

# -- of single ops ----------------------------------------------------------------------------

PEER_FILES = tuple(str(Path(__file__).with_name(name)) for name in ("liger.py", "sdpa.py"))
# "compile" is the reference under torch.compile, the others are registered by these files.
OP_PEERS = ("compile", "liger", "flash", "cudnn")

# -- of training steps ------------------------------------------------------------------------

LLAMA = "transformers.models.llama.modeling_llama"
SEARCHED = tuple(os.environ.get("TINYLLAMA_SEARCH", "").split(","))
AUTOTUNE = "max-autotune-no-cudagraphs"  # the graph is captured here, around the whole step


def _hugging_face(
    name: str, title: str, arguments: dict[str, Any], *requires: str, **traits: Any
) -> Contender:
    factory = "tinyllama.bench.peers.hugging_face_step:HuggingFaceStep"
    needs = ("module transformers", *requires)
    role = traits.pop("role", "peer")
    return Contender(name, title, role, factory, arguments, needs, (LLAMA,), **traits)


CLIENT = _hugging_face(
    "hf-ours",
    "Hugging Face Llama + our ops",
    {"ours": True},
    *("gpu", "triton"),
    role="client",
    only=(("small-bf16",), "its bars are of small in bf16, where the host limits a step"),
)
PEERS = (
    _hugging_face("hf-eager", "Hugging Face Llama, materialised attention", {"attention": "eager"}),
    _hugging_face("hf", "Hugging Face Llama, SDPA", {}),
    _hugging_face(
        "hf-liger", "Hugging Face Llama + Liger", {"liger": True}, "gpu", "module liger_kernel"
    ),
    Contender(
        "compile",
        "V1, torch.compile + graph",
        "peer",
        "tinyllama.bench.steps:TierStep",
        {"tier": "v2", "without": ["norm", "qkv", "attention", "swiglu"]},
        ("capture", "compile"),
    ),
    _hugging_face(
        "hf-compile",
        "Hugging Face, torch.compile + graph",
        {"mode": "default"},
        "capture",
        "compile",
    ),
    _hugging_face(
        "hf-autotune",
        "Hugging Face, max-autotune + graph",
        {"mode": AUTOTUNE},
        "capture",
        "compile",
        only=(SEARCHED, "searched where TINYLLAMA_SEARCH names the group: it takes the longest"),
        alone=True,
    ),
)
