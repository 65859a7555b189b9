from .jobs import Job as Job
from .jobs import jobs as jobs
from .runner import failures as failures
from .runner import sweep as sweep
from .sources import Text as Text
