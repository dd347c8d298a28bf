"""A file as a C array, for what a program carries inside itself.

    tools/embed.py IN OUT.c NAME HEADER      defines NAME and NAME_size as HEADER declares them
"""

import pathlib
import sys

data = pathlib.Path(sys.argv[1]).read_bytes()
out, name, header = sys.argv[2:5]
rows = [", ".join(str(b) for b in data[i:i + 24]) for i in range(0, len(data), 24)]
pathlib.Path(out).write_text(
    f'#include "{header}"\n\nconst unsigned char {name}[] = {{\n    ' + ",\n    ".join(rows) +
    f"\n}};\nconst size_t {name}_size = sizeof({name});\n")
