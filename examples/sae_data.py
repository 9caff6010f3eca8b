"""Train a small sparse autoencoder, or a transcoder, on captured rows that are streamed from the store.

    residuum serve --model FOLDER --temporary --capture-sites resid_post,mlp_in,mlp_out    # in another terminal
    python -m examples.sae_data --layer 15
    python -m examples.sae_data --layer 15 --sites mlp_in,mlp_out

With one site, an autoencoder learns its rows. With two, a transcoder learns to compute the rows at the second from
those at the first: with `mlp_in` and `mlp_out`, what the MLP does.

This program never holds all rows: `residuum.torch.ActivationDataset` reads them from the store as they are needed, in
every epoch.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

import residuum
from residuum.torch import ActivationDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

THINGS = ("The sea", "A violin", "My grandmother", "The stock market", "A prime number", "The Roman Empire", "Rust")
ENDINGS = ("is best known for", "was not what I expected:", "can be explained to a child like this:", "reminds me of")
PROMPTS = [f"{thing} {ending}" for ending in ENDINGS for thing in THINGS]

FEATURES_PER_DIMENSION = 4
ACTIVE_FEATURES = 32


class SparseCoder(torch.nn.Module):
    """A TopK autoencoder or transcoder. It builds each row from the few features that fit its input best.

    The input of an autoencoder is the row itself; that of a transcoder is the same token's row at another site.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        """Make one for rows like these, [tokens, sites, width]."""
        super().__init__()
        width = rows.shape[-1]
        decoder = torch.nn.functional.normalize(torch.randn(FEATURES_PER_DIMENSION * width, width), dim=1)
        self.decoder = torch.nn.Parameter(decoder)
        self.encoder = torch.nn.Parameter(decoder.T.clone())
        self.bias = torch.nn.Parameter(torch.zeros(len(decoder)))
        mean = rows.float().mean(dim=0)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", (rows - mean).norm(dim=-1).mean(dim=0)[:, None])

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised rows at the last site (mean 0, length about 1), and what was built of them."""
        normalised = (rows.float() - self.mean) / self.scale
        given, wanted = normalised[:, 0], normalised[:, -1]
        strengths = given @ self.encoder + self.bias
        best = strengths.topk(ACTIVE_FEATURES, dim=1)
        sparse = torch.zeros_like(strengths).scatter(1, best.indices, best.values.relu())
        return wanted, sparse @ self.decoder


def capture(client: residuum.Client, layer: int, sites: str, tokens: int) -> list[str]:
    """Generate replies to the prompts and capture one layer at some sites; return the request IDs."""
    # The first token's residual stream is an attention sink: large, and nearly equal for all prompts.
    what = residuum.Capture(layers=[layer], sites=sites, positions=slice(1, None))
    replies = client.generate_many(PROMPTS, max_tokens=tokens, capture=what, temperature=0.8, seed=1, ignore_eos=True)
    for reply in replies:
        client.manifest(reply, wait=True)
    return [reply.request_id for reply in replies]


def train(data: ActivationDataset, epochs: int, workers: int) -> Iterator[tuple[SparseCoder, float]]:
    """After each epoch, yield the coder and the share of the rows' variance that it misses."""
    torch.manual_seed(0)
    loader = DataLoader(
        data,
        batch_size=None,  # the dataset makes the batches
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        persistent_workers=workers > 0,
    )
    model = SparseCoder(next(iter(data)).activations)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        missed = total = 0.0
        for batch in loader:
            wanted, built = model(batch.activations)
            loss = (wanted - built).square().sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            missed += float(loss.detach()) * len(wanted)
            total += float(wanted.square().sum())
        yield model, missed / total


def main() -> None:
    """Capture, train, and print how much of the rows the coder misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="localhost:50051", help="the inference service")
    parser.add_argument("--layer", type=int, default=15, help="the layer whose rows are learned")
    parser.add_argument("--sites", default="resid_post", help="the site, or the two sites of a transcoder")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per reply")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="processes that read; 0: read in this process")
    options = parser.parse_args()
    missed = run(options.endpoint, options.layer, options.sites, options.tokens, options.epochs, options.workers)
    print(f"share of the variance missed: {missed[0]:.3f} after the first epoch, {missed[-1]:.3f} after the last")


def run(endpoint: str, layer: int, sites: str, tokens: int, epochs: int, workers: int) -> list[float]:
    """Capture and train; return the share of the variance missed in each epoch."""
    with residuum.Client(endpoint) as client:
        captures = capture(client, layer, sites, tokens)
        # Aligned: each token comes with its rows at all sites, in their order.
        data = ActivationDataset(
            endpoint, captures, layers=[layer], sites=sites, aligned=True, batch_size=256, shuffle_buffer=4096
        )
        missed = []
        for epoch, (_, part) in zip(itertools.count(), train(data, epochs, workers), strict=False):
            print(f"epoch {epoch}: {part:.3f} of the variance missed")
            missed.append(part)
        for name in captures:
            client.delete(name)
    return missed


if __name__ == "__main__":
    main()
