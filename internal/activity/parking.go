package activity

import (
	"sync"

	"github.com/google/uuid"
)

const (
	maxParked      = 4   // conversations that are waited for at one time; each takes a connection
	maxParkedItems = 256 // items that wait for one of them
)

// parking is where the items of a conversation wait that some other transaction holds, so that nobody waits with them: a
// goroutine for each such conversation takes its items in their order, also those that come later. The zero value is
// ready.
type parking struct {
	wait sync.WaitGroup // the goroutines

	mu     sync.Mutex
	parked map[uuid.UUID][]*item // what the conversation's goroutine takes next
}

// divert takes the items of parked conversations out of batch, in place, and returns the rest, and those for which there
// is no room.
func (p *parking) divert(batch []*item) (rest, refused []*item) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.parked) == 0 {
		return batch, nil
	}
	rest = batch[:0]
	for _, it := range batch {
		conv := it.new.ConversationID
		switch items, there := p.parked[conv]; {
		case !there:
			rest = append(rest, it)
		case len(items) < maxParkedItems:
			p.parked[conv] = append(items, it)
		default:
			refused = append(refused, it)
		}
	}
	return rest, refused
}

// park starts a goroutine for the item's conversation, which is not parked yet, and gives it the item and what is
// diverted to it afterwards. It does not, and returns false, when there are too many.
func (p *parking) park(it *item, write func([]*item)) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.parked) >= maxParked {
		return false
	}
	if p.parked == nil {
		p.parked = make(map[uuid.UUID][]*item)
	}
	conv := it.new.ConversationID
	p.parked[conv] = []*item{it}
	p.wait.Go(func() {
		for {
			items := p.next(conv)
			if len(items) == 0 {
				return
			}
			write(items)
		}
	})
	return true
}

// next takes what waits for the conversation; nothing ends the parking.
func (p *parking) next(conv uuid.UUID) []*item {
	p.mu.Lock()
	defer p.mu.Unlock()
	items := p.parked[conv]
	if len(items) == 0 {
		delete(p.parked, conv)
	} else {
		p.parked[conv] = nil
	}
	return items
}
