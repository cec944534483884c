"""The packages. The capstone is written once, in code/main.py, and installed as onecurve/_capstone/main.py."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["onecurve*"]), "onecurve._capstone"], package_dir={"onecurve._capstone": "code"}
)
