"""Denoise with a U-Net whose self-attention sees a fraction of its tokens, and take the patch away again."""

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

from hyptree.tokens.families.diffusers import patch_unet

torch.manual_seed(0)

# Fresh weights, to show the calls; with a trained pipeline this is pipeline.unet and the loop below is the pipeline.
unet = UNet2DConditionModel(
    sample_size=16,
    layers_per_block=1,
    block_out_channels=(32, 64),
    norm_num_groups=8,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=16,
    attention_head_dim=8,
).eval()
noise = torch.randn(1, 4, 16, 16)
text = torch.randn(2, 6, 16)  # without and with a prompt, as classifier-free guidance wants them


@torch.no_grad()
def denoise(num_steps: int = 4, guidance: float = 3.0) -> torch.Tensor:
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(num_steps)
    latent = noise
    for step in scheduler.timesteps:
        without, with_prompt = unet(latent.repeat(2, 1, 1, 1), step, text).sample.chunk(2)
        latent = scheduler.step(without + guidance * (with_prompt - without), step, latent).prev_sample
    return latent


plain = denoise()
with patch_unet(unet, keep=1.0) as handle:
    assert torch.equal(denoise(), plain), "one token per cluster is the plain model"

    for keep in (0.75, 0.5, 0.25):
        handle.keep = keep
        error = ((denoise() - plain).norm() / plain.norm()).item()
        attended = sorted(set(handle.num_tokens.values()))
        print(
            f"keep {keep}: (tokens, attended) {attended} in {len(handle.num_tokens)} blocks, result off by {error:.1%}"
        )
        assert attended == [(256, int(256 * keep))] and 0 < error < 1

    labels = next(iter(handle.labels.values()))  # (2, 256): the cluster of every token in the last step
    print(f"largest cluster of the prompted image: {labels[1].bincount().max().item()} of {labels.shape[1]} tokens")

# Random weights: these figures show that the methods differ, not which one is good.
for method in ("atc", "tome", "kmedoids"):
    with patch_unet(unet, keep=0.5, method=method):
        print(f"{method}: result off by {((denoise() - plain).norm() / plain.norm()).item():.1%} at keep 0.5")

assert torch.equal(denoise(), plain), "nothing is left of the patch"
