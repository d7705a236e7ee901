"""What an export says of itself: README.md, config.json and the metadata of model.onnx.

It is meant for others, so nothing in it names a file of the images, or a folder of this machine.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from ddp_mnist import __version__
from ddp_mnist.config.flag_fields import flag_name
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.data.tables import hub_parts
from ddp_mnist.errors import CheckpointError, blame
from ddp_mnist.nets.published import torchvision_options
from ddp_mnist.system import files
from ddp_mnist.task import about_task
from ddp_mnist.training import folder
from ddp_mnist.training.model_file import TrainedModel
from ddp_mnist.training.scores import MANY_CLASSES, share_text
from ddp_mnist.verbs.flags import Export
from ddp_mnist.verbs.render import render

PREPARATION = (
    "upright as EXIF says; of 16 bits the upper 8; transparent parts on white, or on black if all"
    " that is visible is white; {colour}; {fitted} {height}x{width} (height x width)"
)
FITTED = {
    "crop": "cropped around the centre to the ratio of the sides, then bilinearly resized to",
    "pad": "bilinearly resized as a whole, and in the middle of grey (127 of 255) if its ratio is"
    " another, to",
}
DIGITS = "; a digit in a photo that is not 28x28 is cut out first, as ddp-mnist predict does it"
# timm's nets, and those of torchvision's whose parameters have the same names there
IN_TIMM = re.compile(r"timm:(\w+).*|torchvision:((?:wide_)?resnet\d+\w*|resnext\d+\w+|densenet\d+)")
# What is told of a note on the images: numbers, but no name behind them, nor an earlier run's file
COUNTS = re.compile(
    r"([\d,]+ of [\d,]+ images|images of|normalised as for(?!.*\.safetensors$)) .*?(?=: |, as |$)"
)
SETTINGS = (
    "epochs batch_size optimizer lr weight_decay warmup label_smoothing class_weights augment"
)


def publishable(trained: TrainedModel) -> TrainedModel:
    """Return the model with notes on its images that name none of them."""
    told = [found[0] for note in trained.image_format.notes if (found := COUNTS.match(note))]
    image_format = dataclasses.replace(trained.image_format, notes=told)
    return dataclasses.replace(trained, image_format=image_format)


def metadata(trained: TrainedModel) -> dict[str, str]:
    """Return the facts that a program needs to get from an image file to a class name."""
    made, task = trained.image_format, trained.task
    channels, height, width = made.shape
    colour = "RGB" if channels == 3 else "grey"
    preparation = PREPARATION.format(
        colour=colour, fitted=FITTED[made.fit], height=height, width=width
    )
    colour += ", bright strokes on black" if made.bright_on_black else ""
    names = json.dumps(task.names, ensure_ascii=False)
    output = f"logits: float32 [batch, {task.outputs}], in the order of classes; their softmax are"
    output += " probabilities"
    if about := about_task(task):
        output = f"logits: float32 [batch, {task.outputs}], what {about['task']} predicts from,"
        output += f" with mean {about['mean']} and std {about['std']}, of {names}"
    pixels = f"images: uint8 [batch, {channels}, {height}, {width}], 0 to 255, {colour}"
    return {
        "classes": names,
        "input": f"{pixels}; the model itself normalises the pixels",
        "preparation": preparation + (DIGITS if made.digit_photos else ""),
        "output": output,
    }


def config_of(trained: TrainedModel) -> dict[str, Any]:
    """Return config.json: what prepares an image for the weights in model.safetensors.

    It is in timm's form too, which transformers reads, if timm builds the net with these weights.
    """
    made, task, numbers = trained.image_format, trained.task, about_task(trained.task)
    about: dict[str, Any] = {"made_by": f"ddp_mnist {__version__}"}
    about |= {"architecture": trained.architecture, "classes": task.names, "task": numbers or None}
    about |= dict(zip(("channels", "height", "width"), made.shape, strict=True))
    about |= (normalised := {"mean": made.mean, "std": made.std})
    about |= {name: getattr(made, name) for name in ("bright_on_black", "digit_photos", "fit")}
    about["preparation"] = metadata(trained)["preparation"]
    found = IN_TIMM.fullmatch(trained.architecture)
    if found and made.shape[0] == 3 and not numbers:
        name = found[1] or found[2]
        about |= {"architecture": name, "num_classes": task.outputs, "label_names": task.names}
        size = {"num_classes": task.outputs, "input_size": made.shape, "fixed_input_size": False}
        mode = {"crop": "center", "pad": "border"}[made.fit]
        crop = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": mode}
        about["pretrained_cfg"] = {**size, **crop, **normalised}
    return about


def model_card(trained: TrainedModel, flags: Export) -> str:
    """Return README.md as the Hugging Face Hub reads it.

    Raise CheckpointError if summary.json or config.json of the run is missing or damaged.
    """
    config = folder.read_config(Path(flags.run))
    library, _, net = trained.architecture.partition(":")
    shape = trained.image_format.shape
    with blame(f"{flags.run}/{folder.SUMMARY}", CheckpointError):  # a value that makes no sense
        summary, recipe = files.read_json(Path(flags.run) / folder.SUMMARY), config["recipe"]
        weights = summary["weights"] or "random weights"
        # where a file of weights lies is not for others
        is_name = re.search(r"^\w+_Weights\.|^timm:|^random ", weights)
        return render(
            "model_card.md",
            s=summary,
            about=metadata(trained),
            config=config_of(trained),
            trained=trained,
            flags=flags,
            hub_parts=hub_parts,
            options=torchvision_options(net, shape) if library == "torchvision" else {},
            started=weights if is_name else "a file of weights",
            settings={flag_name(name): recipe[name] for name in SETTINGS.split() if name in recipe},
            many=MANY_CLASSES,
            share_text=share_text,
            wrong=wrong_on_purpose(summary["inject"]),
            version=__version__,
        )
