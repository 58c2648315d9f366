"""Names of spans, attributes and metrics, in one place, so that dashboards and queries hold.

Spans at the edge follow the OpenTelemetry GenAI conventions; metrics carry vLLM's names where the
meaning is vLLM's, so that existing dashboards and autoscalers work, and `stepwell_` elsewhere.
"""

# Spans. A request's trace: gateway server span, queue, prefill, decode, and what pool and worker
# did for it. A step's trace: step, plan, transact, execute.
SPAN_REQUEST_QUEUE = "scheduler.queue"
SPAN_REQUEST_PREFILL = "scheduler.prefill"
SPAN_REQUEST_DECODE = "scheduler.decode"
SPAN_POOL_ADMIT = "kvpool.admit"
SPAN_WORKER_PREFILL = "worker.prefill"
SPAN_WORKER_DECODE = "worker.decode"
SPAN_STEP = "engine.step"
SPAN_STEP_TRANSACT = "scheduler.transact"
SPAN_STEP_EXECUTE = "scheduler.execute"
SPAN_POOL_TRANSACT = "kvpool.transact"
SPAN_WORKER_EXECUTE = "worker.execute"

# Span events of a request.
EVENT_PREEMPTED = "preempted"

# Attributes.
ATTR_REQUEST_ID = "stepwell.request.id"
ATTR_STEP = "stepwell.step"
ATTR_GENERATION = "stepwell.generation"
ATTR_NUM_SCHEDULED_TOKENS = "stepwell.num_scheduled_tokens"
ATTR_NUM_REQUESTS = "stepwell.num_requests"
ATTR_NUM_CACHED_TOKENS = "stepwell.num_cached_tokens"
ATTR_NUM_PROMPT_TOKENS = "stepwell.num_prompt_tokens"
ATTR_NUM_OUTPUT_TOKENS = "stepwell.num_output_tokens"
ATTR_NUM_PREEMPTIONS = "stepwell.num_preemptions"
ATTR_NUM_OPERATIONS = "stepwell.num_operations"
ATTR_NUM_STEPS = "stepwell.num_steps"
ATTR_NUM_BLOCKS = "stepwell.num_blocks"
ATTR_NUM_FREE_BLOCKS = "stepwell.num_free_blocks"
ATTR_WAIT_REASON = "stepwell.wait_reason"
ATTR_WAIT_STEPS = "stepwell.wait_steps"
ATTR_PREEMPTED_FOR = "stepwell.preempted_for"
ATTR_NUM_LOST_TOKENS = "stepwell.num_lost_tokens"
ATTR_STOP_REASON = "stepwell.stop_reason"
ATTR_FINISH_REASON = "stepwell.finish_reason"
ATTR_RANK = "stepwell.rank"

# Metrics of the scheduler and the pool.
METRIC_NUM_REQUESTS_RUNNING = "vllm:num_requests_running"
METRIC_NUM_REQUESTS_WAITING = "vllm:num_requests_waiting"
METRIC_NUM_REQUESTS_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
METRIC_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
METRIC_NUM_PREEMPTIONS = "vllm:num_preemptions"
METRIC_PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries"
METRIC_PREFIX_CACHE_HITS = "vllm:prefix_cache_hits"
METRIC_ITERATION_TOKENS = "vllm:iteration_tokens_total"
METRIC_CACHE_CONFIG = "vllm:cache_config_info"
METRIC_STEP_SECONDS = "stepwell_step_seconds"
METRIC_POOL_USAGE = "stepwell_kvpool_usage_perc"
METRIC_POOL_EVICTIONS = "stepwell_kvpool_evictions"
METRIC_POOL_TRANSACTIONS = "stepwell_kvpool_transactions"

# Metrics at the edge.
METRIC_REQUEST_SUCCESS = "vllm:request_success"
METRIC_PROMPT_TOKENS = "vllm:prompt_tokens"
METRIC_PROMPT_TOKENS_CACHED = "vllm:prompt_tokens_cached"
METRIC_GENERATION_TOKENS = "vllm:generation_tokens"
METRIC_TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
METRIC_INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
METRIC_E2E_REQUEST_LATENCY = "vllm:e2e_request_latency_seconds"
METRIC_ADMISSION_REJECTIONS = "vllm:admission_rejections"
