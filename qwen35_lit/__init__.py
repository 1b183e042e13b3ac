"A literate implementation of the Qwen3.5 hybrid language model: read it, run it, look inside it"
__version__ = "0.1.0"
from . import _start   # first: it minds Ctrl-C while the rest is imported
from .config import Qwen35Error
from .hybrid import load, demo_model
from .plan import plan
from . import generate, trace, effective_attention, intervene   # they add methods to Model and Trace
__all__ = ["load", "demo_model", "plan", "Qwen35Error"]
