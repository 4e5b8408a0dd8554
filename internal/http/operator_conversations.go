package http

import (
	"context"
	"net/http"

	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/tenants"
)

// registerOperatorMessageRoutes: a tenant's conversations and deliveries, by the handlers of the tenant API.
func (s *server) registerOperatorMessageRoutes() {
	const conversation, delivery, ch = "/tenants/{tenant_id}/conversations", "/tenants/{tenant_id}/deliveries", "/channels/{channel_id}"
	s.operatorRoute(http.MethodGet, conversation, bodyNone, s.forTenant(s.listConversations))
	s.operatorRoute(http.MethodGet, conversation+"/{conversation_id}", bodyNone, s.forTenant(s.getConversation))
	s.operatorRoute(http.MethodGet, conversation+"/{conversation_id}/activities", bodyNone, s.forTenant(s.listActivities))
	s.operatorRoute(http.MethodPost, conversation+"/{conversation_id}/close", bodyNone, s.forTenant(s.operatorClose))
	s.operatorRoute(http.MethodPost, conversation+"/{conversation_id}/reopen", bodyNone, s.forTenant(s.operatorReopen))
	s.operatorRoute(http.MethodGet, delivery, bodyNone, s.forTenant(s.listDeliveries))
	s.operatorRoute(http.MethodGet, delivery+"/{delivery_id}", bodyNone, s.forTenant(s.getDelivery))
	s.operatorRoute(http.MethodPost, delivery+"/{delivery_id}/retry", bodyNone, s.forTenant(s.retryDelivery))
	s.operatorRoute(http.MethodPost, ch+"/deliveries/retry", bodyOptional, s.forChannel(s.retryDeliveries))
	s.operatorRoute(http.MethodGet, ch+"/delivery", bodyNone, s.forChannel(s.getDeliveryState))
	s.operatorRoute(http.MethodPost, ch+"/pause", bodyNone, s.forChannel(s.pauseDeliveries))
	s.operatorRoute(http.MethodPost, ch+"/resume", bodyNone, s.forChannel(s.resumeDeliveries))
}

// forTenant lets a handler of the tenant API work for the tenant of the path, in the operator's name.
func (s *server) forTenant(handle func(*call) (*reply, error)) func(*call) (*reply, error) {
	return func(c *call) (_ *reply, err error) {
		if c.Tenant, err = s.enforcedTenant(c); err != nil {
			return nil, err
		}
		return handle(c)
	}
}

// forChannel is forTenant for the tenant whose channel the path names.
func (s *server) forChannel(handle func(*call) (*reply, error)) func(*call) (*reply, error) {
	return func(c *call) (*reply, error) {
		tenant, _, err := s.channelOf(c)
		if err != nil {
			return nil, err
		}
		entry, ok := s.Directory.Tenant(tenant)
		if !ok {
			return nil, tenants.ErrNotFound
		}
		c.Tenant = entry
		return handle(c)
	}
}

func (s *server) operatorClose(c *call) (*reply, error) {
	return c.setConversation(s.Activities.CloseBy)
}

func (s *server) operatorReopen(c *call) (*reply, error) {
	return c.setConversation(s.Activities.ReopenBy)
}

// setConversation closes or reopens the conversation of the path, which is for the audit log when the tenant did not do it.
func (c *call) setConversation(do func(context.Context, tenants.Actor, tenants.ID, uuid.UUID, string) (activity.Conversation, bool, error)) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	v, _, err := do(c.ctx(), c.actor(), c.Tenant.ID, id, reasonManual)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, conversationJSON(v))
}
