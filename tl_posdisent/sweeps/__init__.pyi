from .results import read_results as read_results
from .sweep_jobs import sweep as sweep
