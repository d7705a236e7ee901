import json
import sys
from pathlib import Path

events = json.loads(Path(sys.argv[1]).read_text())["traceEvents"]
print(sum(event["name"] == "gloo:all_reduce" for event in events), "all-reduces")
