"""Images a second of the input pipeline beside what models need: `python benchmarks/data.py --output FILE`.

Training steps of ResNet-18 in turns with making the batch that they eat. Files are JPEGs of 500x375 pixels, written
for the purpose, decoded, scaled to 256 and cropped to 224 as for ImageNet.
"""

import io
import tarfile
import tempfile
from pathlib import Path

import torch
from common import arguments, compare, save
from PIL import Image
from torch.nn import functional as F

from orthocond.lab.classification.networks.resnet import resnet18
from orthocond.lab.data import Pipeline, load, read_factors, sprites

BATCH = 128
FILES = 64


def endless(pipeline):
    epoch = 0
    while True:
        yield from pipeline.batches(epoch)
        epoch += 1


def training_step(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step():
        images, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def photographs(path):
    """A tar of smooth random JPEGs with the size and about the bytes of an average ImageNet file."""
    generator = torch.Generator().manual_seed(0)
    with tarfile.open(path, "w") as archive:
        for index in range(FILES):
            coarse = torch.rand(1, 3, 47, 63, generator=generator)
            pixels = F.interpolate(coarse, (375, 500), mode="bicubic").clamp(0, 1).mul(255).byte()[0].permute(1, 2, 0)
            stream = io.BytesIO()
            Image.fromarray(pixels.numpy()).save(stream, "JPEG", quality=95)
            member = tarfile.TarInfo(f"{index}.jpg")
            member.size = stream.tell()
            stream.seek(0)
            archive.addfile(member, stream)
    return path


def report(title, contenders, images, seconds):
    times = compare(contenders, seconds)
    print(f"\n{title}")
    for name, row in times.items():
        row["images_per_second"] = 1e3 * images[name] / row["median_ms"]
        print(
            f"  {name:44s} {row['median_ms']:9.2f} ms [{row['low_ms']:.2f}, {row['high_ms']:.2f}]"
            f" {row['images_per_second']:10.0f} images/s"
        )
    return {"title": title, "contenders": times}


def small_images(seconds):
    data = sprites(10_000)
    eager, ahead = (endless(Pipeline(data=data, batch_size=BATCH, train=True, prefetch=n)) for n in (0, 2))
    model = resnet18(12, stem="cifar")
    batch = next(eager)
    contenders = {
        "batch: shuffle, crop, flip, normalize": lambda: next(eager),
        "ResNet-18 training step, batch at hand": training_step(model, iter(lambda: batch, None)),
        "ResNet-18 training step with the pipeline": training_step(model, ahead),
    }
    return report(f"32x32 in memory, batch {BATCH}", contenders, dict.fromkeys(contenders, BATCH), seconds)


def large_images(seconds):
    with tempfile.TemporaryDirectory() as folder:
        data = load(photographs(Path(folder) / "images.tar"), in_memory=False)
        scaled = load(Path(folder) / "images.tar", size=256)
        settings = {"batch_size": 32, "train": True, "size": 224, "prefetch": 0}
        files = endless(Pipeline(data=data, resize=256, workers=1, **settings))
        memory = endless(Pipeline(data=scaled, **settings))
        model = resnet18(1000)
        batch = torch.randn(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)
        contenders = {
            "batch from 500x375 JPEG files, one thread": lambda: next(files),
            "batch from 256x256 in memory": lambda: next(memory),
            "ResNet-18 training step, batch at hand": training_step(model, iter(lambda: batch, None)),
        }
        return report("224x224, batch 32", contenders, dict.fromkeys(contenders, 32), seconds)


def rendered_images(seconds):
    images = sprites(500).images
    contenders = {
        "draw 500 sprites of 32 pixels": lambda: sprites(500),
        "read their factors": lambda: read_factors(images),
    }
    return report("sprites", contenders, dict.fromkeys(contenders, 500), seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = arguments(__doc__)
    torch.manual_seed(0)
    save(options.output, [part(options.seconds) for part in (small_images, large_images, rendered_images)])
