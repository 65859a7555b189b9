from .jobs import Job as Job
from .jobs import jobs as jobs
from .model_sources import checkpoint_steps as checkpoint_steps
from .runner import sweep as sweep
from .storage import failures as failures
from .text_sources import Text as Text
