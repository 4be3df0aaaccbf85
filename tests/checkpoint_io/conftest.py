"""torch is imported here, before any test module does: it warns of other packages then, and warnings are errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch  # noqa: F401
