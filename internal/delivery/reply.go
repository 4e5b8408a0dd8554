package delivery

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/fault"
)

// newReply makes the i-th reply of an adapter to an activity, in its conversation. Its idempotency key is the adapter's
// own, else "<type>:<activity id>", so that a repeated delivery finds it there. Its caller is the type: see Targets.
func newReply(ch *channel.Channel, to activity.Activity, i int, r channel.Message) (activity.New, error) {
	n := activity.New{
		TenantID: to.TenantID, ConversationID: to.ConversationID,
		Caller: replyCaller(ch.Type), Author: replyCaller(ch.Type), IdempotencyKey: r.IdempotencyKey,
		Type: r.Type, Sender: r.Sender, Attachments: r.Attachments, ReplyToID: r.ReplyToID,
		Text: text(r.Text),
	}
	if n.IdempotencyKey == "" {
		n.IdempotencyKey = string(ch.Type) + ":" + to.ID.String()
		if i > 0 {
			n.IdempotencyKey += ":" + strconv.Itoa(i)
		}
	}
	if len(r.Metadata) > 0 {
		metadata, err := json.Marshal(r.Metadata)
		if err != nil {
			return n, fmt.Errorf("metadata of a reply: %w", err)
		}
		n.Metadata = metadata
	}
	return n, nil
}

// dropsReply tells the errors that another delivery would meet again.
func dropsReply(err error) bool {
	var invalid *fault.Invalid
	return errors.Is(err, activity.ErrClosed) || errors.Is(err, activity.ErrNotFound) ||
		errors.Is(err, activity.ErrKeyReused) || errors.As(err, &invalid)
}
