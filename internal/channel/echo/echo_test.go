package echo_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/channeltest"
	"converger/internal/channel/echo"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	channeltest.Run(t, channeltest.Subject{Adapter: echo.New(), Config: json.RawMessage(`{"conversation_idle_timeout_seconds":60}`)})
}

func TestSendAnswersMessagesOnly(t *testing.T) {
	t.Parallel()
	id := uuid.MustParse("01930000-0000-7000-8000-00000000000a")
	reply := channel.Message{Type: "message", Sender: "bot", Text: "hi", IdempotencyKey: "echo:" + id.String(), At: channeltest.Now}
	for name, tt := range map[string]struct {
		activity channel.OutboundActivity
		want     []channel.Message
	}{
		"message":        {channel.OutboundActivity{Type: "message", Sender: "user", Text: "hi"}, []channel.Message{reply}},
		"its own":        {channel.OutboundActivity{Type: "message", Sender: "bot", Text: "hi"}, nil},
		"no text":        {channel.OutboundActivity{Type: "message", Sender: "user"}, nil},
		"typing":         {channel.OutboundActivity{Type: "typing", Sender: "user"}, nil},
		"end of a story": {channel.OutboundActivity{Type: "endOfConversation", Sender: "user", Text: "bye"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := echo.New().Send(t.Context(), nil, channel.Outbound{ActivityID: id, Activity: tt.activity, Now: channeltest.Now})
			if diff := cmp.Diff(channel.Outcome{Kind: channel.Sent, Replies: tt.want}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
