"""The sharding engine: layouts, schedules, placement, and what runs them."""
