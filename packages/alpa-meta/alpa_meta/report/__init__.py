"""What the user sees: tables on the terminal and pictures in files."""

from alpa_meta.extras import require

require("alpa_meta.report", "rich", "matplotlib")
