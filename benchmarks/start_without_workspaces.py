"""Start a rehearsal whose convolutions take no workspaces, as on a benchmark's simulated GPU."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fragdoctor" / "rehearsal"))
import start

del sys.path[0]
sys.meta_path.insert(0, SimpleNamespace(find_spec=start.find_spec))
from fragdoctor.rehearsal.engine import cudnn  # noqa: E402
from fragdoctor.rehearsal.engine.treatments import accumulation  # noqa: E402

cudnn.take = lambda *_: None
accumulation.OWN = (*accumulation.OWN, __file__)  # as in ``treated_program.py``
start.main()
