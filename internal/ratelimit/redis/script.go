package redis

import (
	"context"
	_ "embed"
	"errors"

	goredis "github.com/redis/go-redis/v9"

	"converger/internal/ratelimit"
)

//go:embed common.lua
var common string

//go:embed windows.lua
var windows string

//go:embed tokens.lua
var tokens string

//go:embed refund.lua
var refund string

//go:embed reset.lua
var reset string

//go:embed nodes.lua
var nodes string

// One script for each algorithm; what they share is written once. They touch one key each, so that they run on a Redis
// Cluster too, wherever its keys are.
var (
	takeScripts = [...]*goredis.Script{
		ratelimit.FixedWindow:   goredis.NewScript("local ALGORITHM = 'fixed_window'\n" + common + windows),
		ratelimit.SlidingWindow: goredis.NewScript("local ALGORITHM = 'sliding_window'\n" + common + windows),
		ratelimit.TokenBucket:   goredis.NewScript(common + tokens),
	}
	refundScript = goredis.NewScript(common + refund)
	resetScript  = goredis.NewScript(common + reset)
	nodesScript  = goredis.NewScript(nodes)
)

// op is one call of a script.
type op struct {
	script *goredis.Script
	key    string
	args   []any
	answer []int64 // nil: none
}

var errMalformed = errors.New("ratelimit/redis: an answer that is not understood")

// do sends ops at once and gathers their answers. The error is the first of them; other ops may have been done.
func do(ctx context.Context, client goredis.UniversalClient, ops []op) error {
	cmds := make([]*goredis.Cmd, len(ops))
	if len(ops) == 1 {
		cmds[0] = ops[0].script.EvalSha(ctx, client, []string{ops[0].key}, ops[0].args...)
	} else {
		pipe := client.Pipeline()
		for i := range ops {
			cmds[i] = ops[i].script.EvalSha(ctx, pipe, []string{ops[i].key}, ops[i].args...)
		}
		_, _ = pipe.Exec(ctx) // each command has its own error
	}
	var first error
	for i, cmd := range cmds {
		if goredis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") { // a server that has started, or whose scripts were flushed
			cmd = ops[i].script.Eval(ctx, client, []string{ops[i].key}, ops[i].args...)
		}
		answer, err := cmd.Int64Slice()
		if err != nil && cmd.Err() == nil {
			err = errMalformed
		}
		if err == nil {
			ops[i].answer = answer
		} else if first == nil {
			first = err
		}
	}
	return first
}
