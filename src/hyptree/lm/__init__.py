"""HELM: causal language models on the hyperboloid, as Hugging Face models.

``HelmForCausalLM(preset("helm-d-115m-aligned"))`` is ready for ``generate``, ``Trainer`` and ``save_pretrained``; once
this package is imported ``AutoModelForCausalLM.from_pretrained`` knows such folders.
"""

from hyptree.errors import require

require("transformers", "lm")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from hyptree.lm.config import HelmConfig  # noqa: E402
from hyptree.lm.modeling import BalanceCallback, HelmForCausalLM, HelmModel, HelmOutput, HelmPreTrainedModel  # noqa: E402
from hyptree.lm.presets import preset, presets  # noqa: E402

AutoConfig.register("helm", HelmConfig, exist_ok=True)
AutoModel.register(HelmConfig, HelmModel, exist_ok=True)
AutoModelForCausalLM.register(HelmConfig, HelmForCausalLM, exist_ok=True)

__all__ = [
    "BalanceCallback",
    "HelmConfig",
    "HelmForCausalLM",
    "HelmModel",
    "HelmOutput",
    "HelmPreTrainedModel",
    "preset",
    "presets",
]
