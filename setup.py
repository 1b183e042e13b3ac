"Hands settings.ini to setuptools"
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent
config = ConfigParser(interpolation=None, inline_comment_prefixes=("#",), delimiters=("=",))
config.read_string((here / "settings.ini").read_text(encoding="utf-8"))
settings = config["DEFAULT"]


def lines(key): return [o.strip() for o in settings[key].splitlines() if o.strip()]


name, extras = settings["lib_name"], [k.removesuffix("_requirements") for k in settings if k.endswith("_requirements")]
setup(
    name=name,
    version=settings["version"],
    description=settings["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    keywords=settings["keywords"].split(),
    license_expression=settings["license"],
    classifiers=[f"Development Status :: {settings['status']}", "Intended Audience :: Education", "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    python_requires=f">={settings['min_python']}",
    packages=[name],
    package_data={name: ["data/*"]},
    include_package_data=False,
    install_requires=lines("requirements"),
    extras_require={o: lines(f"{o}_requirements") for o in extras},
    entry_points={
        "console_scripts": lines("console_scripts") + lines("dev_scripts"),
        "nbdev": [f"{name} = {name}._modidx:d"],
    },
    zip_safe=False,
)
