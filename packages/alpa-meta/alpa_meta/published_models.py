"""Published models by name: shape, arithmetic, optimiser, batch and cluster, each with its source.

A record is data; `alpa_meta.corpus.build(name)` makes the training step of its program. Weights and
moments are float32, products run in `dtype`, and nothing is recomputed: that is the planner's
choice. Vocabularies are padded as Megatron-LM pads them. Where a source trains on several batches,
the largest that it reports is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from attrs import frozen

from alpa_meta.types import Fields

ALPA = "Zheng et al., Alpa, OSDI 2022, tables 4-6; benchmark/alpa/suite_*.py of its repository"
LLAMA_2 = "Touvron et al., Llama 2, 2023, table 1"
LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3"
MIXTRAL = "Jiang et al., Mixtral of Experts, 2024, table 1"
GALVATRON = "Miao et al., Galvatron, VLDB 2023; tools/Galvatron of PKU-DAIR/Hetu"
GALVATRON_2 = "Hetu-Galvatron v2.0, models/gpt_hf and models/llama_hf, example configurations"
TERAPIPE = "Li et al., TeraPipe, ICML 2021, table 1; MODEL_CONFIGS of its repository"
GPT_3 = "Brown et al., Language Models are Few-Shot Learners, 2020, table 2.1"


@frozen(kw_only=True)
class PublishedModel:
    """A model of a paper: `shape` has the fields of the shape of the corpus's module `program`.

    `exact=False`: the source takes batch statistics of each microbatch, as
    `alpa_meta.Options.exact` then allows.
    """

    name: str
    program: str
    shape: Mapping[str, object]
    cluster: str  # that the source trains it on
    source: str
    exact: bool = True


def _gpt_suite() -> Iterator[PublishedModel]:
    """Yield Alpa's GPT suite: global batch 1,024 of 1,024 tokens, float16 on V100."""
    for size, hidden, layers, heads, cluster in (
        ("125m", 768, 12, 12, "p3.16xlarge:1"),
        ("350m", 1024, 24, 16, "p3.16xlarge:1"),
        ("760m", 1536, 24, 16, "p3.16xlarge:2"),
        ("1.3b", 2048, 24, 32, "p3.16xlarge:4"),
        ("2.6b", 2560, 32, 32, "p3.16xlarge:8"),
        ("6.7b", 4096, 32, 32, "p3.16xlarge:2x8"),
        ("15b", 5120, 48, 40, "p3.16xlarge:4x8"),
        ("39b", 8192, 48, 64, "p3.16xlarge:8x8"),
        ("76b", 10240, 60, 80, "p3.16xlarge:16x8"),
    ):
        yield PublishedModel(
            name=f"gpt-{size}",
            program="transformer",
            shape=_transformer(layers, hidden, heads, 51200, 1024, 1024, "float16"),
            cluster=cluster,
            source=ALPA,
        )


def _transformer(
    layers: int, hidden: int, heads: int, vocab: int, length: int, batch: int, dtype: str
) -> Fields:
    return {
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "inner": 4 * hidden,
        "vocab": vocab,
        "length": length,
        "batch": batch,
        "dtype": dtype,
    }


def _moe_suite() -> Iterator[PublishedModel]:
    """Yield Alpa's MoE suite: experts in every second layer, inner width 8 x hidden, Adafactor.

    Tokens are grouped by sequence (1,024), in the source by two sequences; capacity is 2 / experts.
    """
    for size, hidden, layers, experts, cluster in (
        ("380m", 768, 8, 8, "p3.16xlarge:1"),
        ("690m", 768, 8, 16, "p3.16xlarge:2"),
        ("1.3b", 768, 16, 16, "p3.16xlarge:4"),
        ("2.4b", 1024, 16, 16, "p3.16xlarge:8"),
        ("7.1b", 1280, 16, 32, "p3.16xlarge:2x8"),
        ("10b", 1536, 16, 32, "p3.16xlarge:2x8"),
        ("27b", 2048, 16, 48, "p3.16xlarge:4x8"),
        ("70b", 2048, 32, 64, "p3.16xlarge:8x8"),
        ("140b", 2048, 32, 128, "p3.16xlarge:16x8"),
    ):
        shape = _transformer(layers, hidden, 16, 32000, 1024, 1024, "float16")
        yield PublishedModel(
            name=f"moe-{size}",
            program="transformer",
            shape=shape
            | {
                "inner": 8 * hidden,
                "num_experts": experts,
                "capacity": 2 * 1024 // experts,
                "optimiser": "adafactor",
            },
            cluster=cluster,
            source=ALPA,
        )


def _wide_resnet_suite() -> Iterator[PublishedModel]:
    """Yield Alpa's Wide-ResNet suite: 224 x 224 images, 1,024 classes, float32, momentum."""
    for size, blocks, base, width, batch, cluster in (
        ("250m", (3, 4, 6, 3), 160, 2, 1536, "p3.16xlarge:1"),
        ("500m", (3, 4, 6, 3), 224, 2, 1536, "p3.16xlarge:2"),
        ("1b", (3, 4, 6, 3), 320, 2, 1536, "p3.16xlarge:4"),
        ("2b", (3, 4, 6, 3), 448, 2, 1536, "p3.16xlarge:8"),
        ("4b", (3, 4, 6, 3), 640, 2, 1536, "p3.16xlarge:2x8"),
        ("6.8b", (3, 4, 6, 3), 320, 16, 1536, "p3.16xlarge:4x8"),
        ("13b", (3, 4, 23, 3), 320, 16, 1520, "p3.16xlarge:8x8"),
    ):
        yield PublishedModel(
            name=f"wide-resnet-{size}",
            program="bottleneck_resnet",
            shape={
                "blocks": blocks,
                "base": base,
                "width": width,
                "image": 224,
                "num_classes": 1024,
                "batch": batch,
            },
            cluster=cluster,
            source=ALPA,
            exact=False,
        )


def _llamas() -> Iterator[PublishedModel]:
    """Yield Llama 2 and 3, with the batches in tokens of pre-training at their first length, and
    Mixtral, whose batch is not published."""
    # 4M tokens for Llama 2 and 8B and 70B of Llama 3; 16M tokens for 405B at 8,192 tokens.
    for name, layers, hidden, heads, kv, inner, vocab, length, batch, cluster, source in (
        ("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, 64, "a100-40gb:8", GALVATRON_2),
        ("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, 1024, "a100-80gb:8x8", LLAMA_2),
        ("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, 1024, "a100-80gb:8x8", LLAMA_2),
        ("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, 1024, "a100-80gb:64x8", LLAMA_2),
        ("llama-8b", 32, 4096, 32, 8, 14336, 128256, 8192, 512, "h100:8x8", LLAMA_3),
        ("llama-70b", 80, 8192, 64, 8, 28672, 128256, 8192, 512, "h100:64x8", LLAMA_3),
        ("llama-405b", 126, 16384, 128, 8, 53248, 128256, 8192, 2048, "h100:2048x8", LLAMA_3),
        ("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096, 256, "h100:8x8", MIXTRAL),
    ):
        shape: dict[str, object] = {
            "num_layers": layers,
            "hidden": hidden,
            "num_heads": heads,
            "num_key_value_heads": kv,
            "inner": inner,
            "vocab": vocab,
            "length": length,
            "batch": batch,
            "dtype": "bfloat16",
        }
        if name == "mixtral-8x7b":  # capacity 1.25 of what an even load needs, 2 experts a token
            shape |= {"num_experts": 8, "capacity": 1280}
        yield PublishedModel(
            name=name, program="llama", shape=shape, cluster=cluster, source=source
        )


def _galvatron() -> Iterator[PublishedModel]:
    """Yield Galvatron's models: float32, Adam, on 8 TITAN RTX; the GPTs of v2.0 in bfloat16."""
    titan = "rtx-titan:8"
    for depth, batch in ((32, 32), (48, 16)):
        yield PublishedModel(
            name=f"bert-huge-{depth}",
            program="transformer",
            shape=_transformer(depth, 1280, 16, 30592, 512, batch, "float32") | {"causal": False},
            cluster=titan,
            source=GALVATRON,
        )
    for depth, batch in ((32, 152), (48, 136)):
        yield PublishedModel(
            name=f"vit-huge-{depth}",
            program="vit",
            shape={
                "num_layers": depth,
                "hidden": 1280,
                "num_heads": 16,
                "image": 224,
                "patch": 16,
                "num_classes": 1000,
                "batch": batch,
            },
            cluster=titan,
            source=GALVATRON,
        )
    for depth, batch in ((32, 32), (48, 16)):
        yield PublishedModel(
            name=f"t5-large-{depth}",
            program="t5",
            shape={
                "num_layers": depth // 2,
                "hidden": 1024,
                "num_heads": 16,
                "head": 64,
                "inner": 4096,
                "vocab": 32128,
                "source": 512,
                "target": 512,
                "batch": batch,
                "optimiser": "adam",
            },
            cluster=titan,
            source=GALVATRON,
        )
    for depth, third, batch in ((32, 26, 144), (48, 42, 120)):
        yield PublishedModel(
            name=f"swin-huge-{depth}",
            program="swin",
            shape={
                "depths": (2, 2, third, 2),
                "hidden": 320,
                "head": 32,
                "window": 7,
                "image": 224,
                "patch": 4,
                "num_classes": 1000,
                "batch": batch,
            },
            cluster=titan,
            source=GALVATRON,
        )
    for size, layers, hidden, heads, batch in (
        ("1.5b", 48, 1600, 32, 144),
        ("2.7b", 32, 2560, 32, 64),
    ):
        yield PublishedModel(
            name=f"gpt-{size}",
            program="transformer",
            shape=_transformer(layers, hidden, heads, 50304, 1024, batch, "bfloat16"),
            cluster="a100-40gb:2x8",
            source=GALVATRON_2,
        )


def _terapipe() -> Iterator[PublishedModel]:
    """Yield TeraPipe's GPT-3 models, sequences of 2,048 tokens or as named, on p3.16xlarge."""
    for size, layers, hidden, heads, length, batch, hosts in (
        ("1b", 24, 2048, 16, 2048, 128, 24),
        ("13b", 40, 5120, 40, 2048, 32, 40),
        ("13b-4096", 40, 5120, 40, 4096, 8, 40),
        ("13b-6144", 40, 5120, 40, 6144, 4, 40),
        ("13b-8192", 40, 5120, 40, 8192, 2, 40),
        ("44b", 96, 6144, 48, 2048, 8, 48),
        ("175b", 96, 12288, 96, 2048, 2, 48),
    ):
        yield PublishedModel(
            name=f"gpt3-{size}",
            program="transformer",
            shape=_transformer(layers, hidden, heads, 51200, length, batch, "float16"),
            cluster=f"p3.16xlarge:{hosts}x8",
            source=TERAPIPE,
        )
    yield PublishedModel(
        name="gpt-175b",
        program="transformer",
        shape=_transformer(96, 12288, 96, 51200, 2048, 1536, "bfloat16"),
        cluster="a100-80gb:128x8",
        source=f"{GPT_3}; batch of Narayanan et al., Megatron-LM, SC 2021, table 1",
    )


PUBLISHED: Mapping[str, PublishedModel] = MappingProxyType(
    {
        model.name: model
        for suite in (_gpt_suite, _moe_suite, _wide_resnet_suite, _llamas, _galvatron, _terapipe)
        for model in suite()
    }
)
"""The published models by name."""
